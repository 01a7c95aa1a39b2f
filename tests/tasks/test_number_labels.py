"""Numeric labels in JSON, where the same class may be a string, an int or a float."""

import json

from i2cl.tasks import load_task


def test_number_is_one_label_as_int_float_or_string(tmp_path):
    path = tmp_path / "rows.jsonl"
    cells = (1, "1", 1.0, "2", 2, 2.0)
    path.write_text("".join(json.dumps({"text": f"text {cell!r}", "label": cell}) + "\n" for cell in cells))
    task = load_task(str(path), template="{text} {label}")
    assert [task.labels[example.label] for example in task.train] == ["1", "1", "1", "2", "2", "2"]
