"""What a person sees while a run is under way: a live bar on a terminal, a line now and then elsewhere."""

import signal
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tailorfl.federation.rounds import Round


class RunProgress:
    """Shows the rounds of one run; a context manager."""

    def __init__(self, console: Console, title: str, rounds: int) -> None:
        self.console, self.title, self.rounds = console, title, rounds
        self.live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.live.add_task(title, total=rounds, figures="")
        self.accuracy = ""

    def __enter__(self) -> "RunProgress":
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def __call__(self, record: Round) -> None:
        loss = "-" if record.loss is None else f"{record.loss:.4f}"
        if record.evaluation:
            accuracy = record.evaluation.personalized.accuracy
            self.accuracy = "" if accuracy is None else f"accuracy {accuracy:.2%}"
        figures = f"loss {loss} {self.accuracy}"
        self.live.update(self.task, completed=record.number, figures=figures)
        if record.evaluation and not self.console.is_terminal:
            self.console.print(f"{self.title}: round {record.number} of {self.rounds}, {figures}", highlight=False)


class StopOnInterrupt:
    """Turns the first Ctrl-C into a wish to stop after the round; the second one stops at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.wanted = False

    def __enter__(self) -> "StopOnInterrupt":
        self.before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        self.console.print("stopping after this round; once more to stop at once")
