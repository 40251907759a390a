# SPDX-License-Identifier: Apache-2.0
"""Readers name the file, the place and what to do; writers leave a whole file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import msgspec
import pytest
import torch

from oktopk.lab.tasks.base import RANGES, specs_of
from oktopk.lab.tasks.registry import TASKS, options_type
from oktopk.lab.train.config import COMMON, Config, as_dict, make_config
from oktopk.lab.train.config_files import load, load_run, parse, to_toml
from oktopk.utils import files
from oktopk.utils.files import FileError

FIELDS = as_dict(Config())


class Facts(msgspec.Struct):
    step: int
    files: dict[str, int]


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"lr = 1\nname = '\xff'\n")
    with pytest.raises(
        FileError, match=r"a.toml: line 2: byte 0xff is not UTF-8; save it as UTF-8"
    ):
        load(str(path))


def test_the_wrong_field_of_json_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"step": "x", "files": {}}')
    with pytest.raises(FileError, match=r"a.json: step: Expected `int`, got `str`; look at it"):
        files.read_json(path, Facts, advice="look at it")


@pytest.mark.parametrize("name", ["missing", "folder", "x" * 300, "a\0b", "pipe"])
def test_what_is_no_file_is_one_error(tmp_path, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for read in (files.read_text, lambda path: files.read_json(path, Facts)):
        with pytest.raises(FileError):
            read(tmp_path / name)


def test_a_file_larger_than_expected_is_not_read(tmp_path):
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(files.MAX_BYTES + 1)
    with pytest.raises(FileError, match="has more than"):
        files.read_text(path)


def test_a_tensor_where_numbers_by_name_belong_is_an_error_of_the_file():
    with pytest.raises(FileError, match="holds an object of an unexpected type"):
        files.convert({"step": 1, "files": torch.ones(2)}, Facts, "x.pt")


def test_errors_cross_processes():
    error = files.file_error("a", "is wrong", place="line 1", advice="mend it")
    assert str(pickle.loads(pickle.dumps(error))) == "a: line 1: is wrong; mend it"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    files.write_atomically(path, "old")
    (tmp_path / "b").mkdir()
    with pytest.raises(OSError):
        files.write_atomically(tmp_path / "b", "new")
    with pytest.raises(TypeError):
        files.write_atomically(path, None)  # it fails while it writes
    assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"x": Touch()}, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"a.pt: is damaged, or holds more than tensors"):
        files.read_tensors(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_every_number_of_a_config_has_bounds():
    specs = {name: s for name, s in COMMON.items() if s.metadata["type"] in (int, float)}
    assert sorted(specs) == sorted(RANGES)
    for name in TASKS:
        for own in specs_of(options_type(name)).values():
            assert own.metadata["type"] not in (int, float) or own.metadata["bounds"], own.name


@pytest.mark.parametrize("name", RANGES)
def test_numbers_beyond_their_bounds_are_refused_by_name(name):
    kind = COMMON[name].metadata["type"]
    for value in (kind(RANGES[name][1] * 2 + 1), -10, 10**400, 10**5000):
        with pytest.raises(ValueError, match=f"{name} must be") as caught:
            Config(**{name: value}, optimizer="adamw")
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 5", "name must be text, got 5"),
        ("name = 'a b'", "name must be letters"),
        (f"name = '{'a' * 300}'", "at most 100 bytes"),
        ("[lr]\na = 1", "lr must be a number, got a dict"),
        ("lr = [[1]]", "lr must be a number, got a list"),
        ("lr = " + "[" * 5000, "is not valid TOML"),
        ("lr = " + "9" * 400, "lr must be at most 1000"),
        ("lr = " + "9" * 9000, "is not valid TOML"),
        ("lr = 1e300", "lr must be at most 1000 .weights would overflow"),
        ("timeout = 1e18", "timeout must be at most 604800 .more than a week"),
        ("channels = 1000000", "channels must be at most 1024"),
        ("workers = 1000000000", "workers must be at most 1024"),
        ("hidden = 16000\nlayers = 100", "make about 2.0e.11 weights"),
        ("lr_decay = 9.0\nepochs = 900", "makes the learning rate 0"),
        ('data = "a\\u0000b"', "data has the character"),
        ("a.b.c.d = 1", "unknown key 'a'"),
    ],
)
def test_what_would_fail_late_is_refused_with_the_file(text, message):
    with pytest.raises(FileError, match=message) as caught:
        parse(text, "x", "mine.toml")
    assert str(caught.value).startswith("mine.toml: ") and "\n" not in str(caught.value)


def test_any_path_survives_its_config(tmp_path):
    path = tmp_path / "config.toml"
    config = make_config(
        data="speech \N{GRINNING FACE} \N{GREEK SMALL LETTER DELTA} \"'\\", lr=1e-30
    )
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_run(path) == config


@pytest.mark.parametrize("kept", [0, 1, len(FIELDS) - 1])
def test_settings_of_a_run_must_all_be_there(tmp_path, kept):
    """A default in the place of a lost setting would train something else."""
    path = tmp_path / "config.toml"
    lines = to_toml(Config()).splitlines(keepends=True)
    path.write_text("".join(lines[: 2 * kept]))
    missing = len(FIELDS) - kept
    with pytest.raises(FileError, match=rf"config.toml: {missing} of {len(FIELDS)} settings are"):
        load_run(path)
