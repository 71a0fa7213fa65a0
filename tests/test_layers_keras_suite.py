"""Keras' own tests of its attention layers, run on ours: all hold but those named here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import keras
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SUITES = {
    "multi_head_attention_test.py": "MultiHeadAttentionTest",
    "grouped_query_attention_test.py": "GroupedQueryAttentionTest",
}

ALIGNED = "a causal mask with fewer keys than queries is aligned to the bottom right, so the first queries see nothing"
FAILS = {
    "MultiHeadAttentionTest.test_masking_causal": ALIGNED,
    "MultiHeadAttentionTest.test_masking_with_different_shapes": "a mask of real numbers is refused",
    "GroupedQueryAttentionTest.test_masking_causal": ALIGNED,
    "GroupedQueryAttentionTest.test_shape_mismatch_error_query_value_dim_mismatch": (
        "a value may have another width than the query"
    ),
}
if keras.backend.backend() != "tensorflow":  # there Keras skips these two
    SERVED = "with flash_attention=True, dropout and scores are served instead of refused"
    FAILS["MultiHeadAttentionTest.test_flash_attention_with_errors"] = SERVED
    FAILS["GroupedQueryAttentionTest.test_flash_attention_with_errors"] = SERVED

PLUGIN = """
import keras
import keras.src.layers
import mmattn.layers

for module in (keras.layers, keras.src.layers):
    module.MultiHeadAttention = mmattn.layers.MultiHeadAttention
    module.GroupQueryAttention = module.GroupedQueryAttention = mmattn.layers.GroupedQueryAttention
"""


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_exactly_the_named_tests_of_keras_fail_with_our_layers(suite, tmp_path):
    import keras.src.layers.attention

    path = Path(keras.src.layers.attention.__file__).parent / suite
    if not path.is_file():
        pytest.skip(f"Keras {keras.__version__} is installed without its tests: no {path}")
    (tmp_path / "our_layers.py").write_text(PLUGIN)
    found = tmp_path / "found.xml"
    paths = [str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(path), "-q", "--tb=short", f"--junitxml={found}"),
            *("-p", "our_layers", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert found.is_file(), done.stdout + done.stderr
    cases = {
        f"{case.get('classname').rpartition('.')[2]}.{case.get('name')}": {child.tag for child in case}
        for case in ElementTree.parse(found).iter("testcase")
    }
    assert len(cases) > 20
    failed = {name for name, marks in cases.items() if marks & {"failure", "error"}}
    assert failed == {name for name in FAILS if name.startswith(SUITES[suite])}, done.stdout
