from pathlib import Path

# The sources are not there when the tests run against an installed wheel.
if not Path(__file__).parents[1].joinpath("setup.py").exists():
    collect_ignore = ["test_fake_packaging.py"]
