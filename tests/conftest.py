import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # tests share tinymodels.py

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data beside the project; tests that need it skip where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the folder ../shared with real data is not there")
    return SHARED


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side: one torch thread each."""
    if "torch" in sys.modules or os.environ.get("PYTEST_XDIST_WORKER"):
        import torch

        torch.set_num_threads(1)
