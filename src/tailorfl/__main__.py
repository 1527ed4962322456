"""``python -m tailorfl`` is the command ``tailor``."""

from tailorfl.cli import main

main()
