"""What every test starts from. Environment variables are set here because they count only before Keras is imported."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("MMATTN_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with the data sets that are not part of the project; the test is skipped where there is none."""
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA} (MMATTN_DATA names another folder)")
    return DATA


@pytest.fixture(autouse=True)
def _same_numbers_each_time(request: pytest.FixtureRequest) -> None:
    """Seeds Python, NumPy and Keras, in the tests that use Keras."""
    import sys

    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(7)
