"""Run the command line: ``python -m core_plugin``."""

from core_plugin.cli import main

main()
