"""The one home of files that hold a record in each line."""

from pathlib import Path
from typing import NamedTuple

import pytest

from crossbn.lab.records import RecordError, append_lines, read_lines


class Number(NamedTuple):
    value: int

    def to_json(self) -> str:
        return str(self.value)


def parse(line: str) -> Number:
    return Number(int(line))


def test_a_file_grows_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    assert read_lines(path, parse, "a number") == []
    append_lines(path, [Number(1), Number(2)])
    append_lines(path, [Number(3)])
    assert path.read_text() == "1\n2\n3\n"
    assert read_lines(path, parse, "a number") == [Number(1), Number(2), Number(3)]


@pytest.mark.parametrize("line", [b"two", b"\xff\xfe", b""])
def test_says_which_line_is_something_else(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_bytes(b"1\n" + line + b"\n3\n")
    with pytest.raises(RecordError, match=rf"line 2 of {path} is not a number"):
        read_lines(path, parse, "a number")
