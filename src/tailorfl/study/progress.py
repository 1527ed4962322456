"""What a person sees while a run is under way: a live bar on a terminal, a line now and then elsewhere."""

import signal
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
        self.evaluated = ""

    def __enter__(self) -> "RunProgress":
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def __call__(self, line: dict[str, Any]) -> None:
        """A round has ended; ``line`` is what is written of it."""
        if "personalized_loss" in line:
            self.evaluated = _tested(line["personalized_accuracy"], line["personalized_loss"])
        loss = "-" if line["loss"] is None else f"{line['loss']:.4g}"
        figures = f"training loss {loss}{self.evaluated}"
        self.live.update(self.task, completed=line["round"], figures=figures)
        if "personalized_loss" in line and not self.console.is_terminal:
            self.console.print(f"{self.title}: round {line['round']} of {self.rounds}, {figures}", highlight=False)


def _tested(accuracy: float | None, loss: float | None) -> str:
    if accuracy is not None:
        return f", accuracy {100 * accuracy:.2f} %"
    return "" if loss is None else f", test loss {loss:.4g}"


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
