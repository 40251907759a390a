# SPDX-License-Identifier: Apache-2.0
"""AN4, manifests, their repair, and what `oktopk data` says of them."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from oktopk.cli import parser
from oktopk.lab.tasks.speech.an4 import ACTIONS, convert, repair
from oktopk.lab.tasks.speech.recordings import (
    DataError,
    Utterance,
    check,
    find_manifests,
    read_manifest,
    speaker,
    write_manifest,
)
from recordings import RATE, SECONDS, TEST, TRAIN, an4_like, save, tone

REAL = Path(__file__).parents[3] / "shared" / "an4"


def command(*words: object) -> int:
    args = parser([]).parse_args(["data", *map(str, words)])
    return args.run(args)


@pytest.mark.parametrize("kind", ["big-endian", "little-endian", "sph", "wav", "flac"])
def test_an4_of_every_kind_becomes_the_same_corpus(tmp_path, kind):
    manifests = convert(an4_like(tmp_path / "an4", kind), tmp_path / "out")
    assert manifests == find_manifests(tmp_path / "out")
    train, test = map(read_manifest, manifests)
    assert {u.audio.stem: u.text for u in train} == TRAIN
    assert {u.audio.stem: u.text for u in test} == TEST
    assert {u.audio.stem: u.seconds for u in (*train, *test)} == SECONDS
    check(train, test)
    samples, _ = soundfile.read(tmp_path / "out" / "train" / "an2-fash-b.wav", dtype="int16")
    np.testing.assert_array_equal(samples, tone(2.0, seed=1))


def test_a_slow_disk_shows_progress(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("oktopk.utils.console.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    convert(an4_like(tmp_path / "an4"), tmp_path / "out")
    said = capsys.readouterr().out
    assert f"recordings converted, in three passes: 1 of {3 * len(SECONDS)}" in said


def test_manifests_are_relative_sorted_and_movable(tmp_path):
    convert(an4_like(tmp_path / "an4"), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    path = tmp_path / "moved" / "an4_train_manifest.csv"
    assert path.read_text().splitlines() == [
        f"train/{stem}.wav,train/{stem}.txt" for stem in ("an1-fash-b", "cen3-mabc-b", "an2-fash-b")
    ]
    assert [u.seconds for u in read_manifest(path)] == [0.8, 1.5, 2.0]


def test_pruning_leaves_short_ones_out_of_training_only(tmp_path):
    source = an4_like(tmp_path / "an4")
    save(source / "wav/an4test_clstk/fcaw/an4-fcaw-b", tone(0.6), "big-endian")
    train, test = map(read_manifest, convert(source, tmp_path / "out", prune=True))
    assert [u.seconds for u in train] == [1.5, 2.0] and [u.seconds for u in test] == [0.6]


def tarball(path: Path, source: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, "an4")
    return path


def test_a_tarball_will_do(tmp_path):
    archive = tarball(tmp_path / "an4.tar.gz", an4_like(tmp_path / "an4"))
    train, _ = convert(archive, tmp_path / "out")
    assert len(read_manifest(train)) == 3


def test_a_tarball_cannot_write_elsewhere(tmp_path):
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        member = tarfile.TarInfo("../../evil.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(DataError, match=r"cannot be unpacked.*outside the destination"):
        convert(tmp_path / "bad.tar", tmp_path / "out")
    (tmp_path / "cut.tar.gz").write_bytes(tarball(tmp_path / "x.tgz", tmp_path).read_bytes()[:99])
    with pytest.raises(DataError, match="cannot be unpacked"):
        convert(tmp_path / "cut.tar.gz", tmp_path / "out")


def spoil(root: Path, how: str) -> None:
    wav = root / "wav/an4_clstk/fash/an1-fash-b.raw"
    texts = root / "etc/an4_train.transcription"
    actions = {
        "missing": wav.unlink,
        "empty": lambda: wav.write_bytes(b""),
        "odd": lambda: wav.write_bytes(wav.read_bytes()[:-1]),
        "silent": lambda: wav.write_bytes(bytes(32_000)),
        "no text": lambda: texts.write_text("\n".join(texts.read_text().splitlines()[1:])),
        "empty text": lambda: texts.write_text(texts.read_text().replace("GO", "")),
        "characters": lambda: texts.write_text(texts.read_text().replace("GO", "G0 ++UM++")),
        "speaker": lambda: _move_speaker(root),
        "no list": (root / "etc/an4_test.fileids").unlink,
        "no etc": lambda: (root / "etc").rename(root / "etcetera"),
    }
    actions[how]()


def _move_speaker(root: Path) -> None:
    save(root / "wav/an4test_clstk/fash/an7-fash-b", tone(), "big-endian")
    for kind, line in (("fileids", "an4test_clstk/fash/an7-fash-b"), ("transcription", "NO")):
        with (root / "etc" / f"an4_test.{kind}").open("a") as file:
            file.write(line + (" (an7-fash-b)" if kind == "transcription" else "") + "\n")


@pytest.mark.parametrize(
    "how, message",
    [
        ("missing", r"wav/an4_clstk/fash/an1-fash-b .*is missing; an4_train.fileids lists it"),
        ("empty", "an1-fash-b.raw is empty"),
        ("odd", "an1-fash-b.raw is truncated"),
        ("silent", "an1-fash-b.raw is silent"),
        ("no text", "an1-fash-b has no line in an4_train.transcription"),
        ("empty text", "an1-fash-b: empty transcript"),
        ("characters", r"an1-fash-b: no label for '\+0' in transcript"),
        ("speaker", "speaker fash is in the training and the test list"),
        ("no list", "an4_test.fileids is missing"),
        ("no etc", "is not AN4"),
    ],
)
def test_an4_with_a_defect_is_refused_whole(tmp_path, capsys, how, message):
    root = an4_like(tmp_path / "an4")
    spoil(root, how)
    with pytest.raises(DataError, match=message):
        convert(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert command("an4", root, "--out", tmp_path / "out") == 1
    assert "oktopk data an4: " in capsys.readouterr().err


def test_all_defects_of_an4_are_named_together(tmp_path):
    root = an4_like(tmp_path / "an4")
    for how in ("silent", "speaker"):
        spoil(root, how)
    (root / "wav/an4test_clstk/fcaw/an4-fcaw-b.raw").unlink()
    with pytest.raises(DataError) as error:
        convert(root, tmp_path / "out")
    assert len(error.value.problems) == 3


def utterance(path: Path, text: str = "GO", seconds: float = 1.0) -> Utterance:
    samples = tone(seconds)
    soundfile.write(path, samples, RATE)
    path.with_suffix(".txt").write_text(text)
    return Utterance(path, text, seconds)


def test_check_names_everything_at_once(tmp_path):
    train = [utterance(tmp_path / f"an{i}-fash-b.wav") for i in range(4)]
    train[1] = utterance(train[1].audio, "G0!")
    train[2] = utterance(train[2].audio, "ERASE ALL THE LETTERS AND START AGAIN", 0.5)
    soundfile.write(train[3].audio, np.zeros(RATE, np.int16), RATE)
    test = [utterance(tmp_path / "an9-fash-b.wav"), utterance(tmp_path / "an8-mabc-b.wav", "")]
    with pytest.raises(DataError) as error:
        check([*train, train[0]], [*test, train[0]])
    expected = [
        r"an1-fash-b.wav: no label for '!0' in its transcript 'G0!'",
        "an2-fash-b.wav: 0.50 s are too short for its transcript",
        "an3-fash-b.wav is silent",
        "an8-mabc-b.wav has an empty transcript",
        "an0-fash-b.wav is 2 times in the training list",
        "speaker fash is in the training list and in the test list",
        "an0-fash-b.wav is in the training list and in the test list",
    ]
    assert len(error.value.problems) == len(expected)
    for problem, words in zip(error.value.problems, expected, strict=True):
        assert words in problem
    with pytest.raises(DataError, match="the test list is empty"):
        check(train[:1], [])


def test_a_manifest_names_file_and_line(tmp_path):
    utterance(tmp_path / "a.wav")
    (tmp_path / "b.wav").touch()
    path = tmp_path / "train_manifest.csv"
    lines = ["a.wav,a.txt", "b.wav,a.txt", "", "a.wav", "/home/you/c.wav,nothing.txt"]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        read_manifest(path)
    places = [problem.split(": ")[0] for problem in error.value.problems]
    assert places == [f"{path}:{line}" for line in (2, 4, 5, 5)]
    assert "is empty" in error.value.problems[0] and "found 1 cells" in error.value.problems[1]
    assert "`oktopk data fix-manifest` repairs it" in error.value.problems[2]
    assert "nothing.txt is missing" in error.value.problems[3]
    with pytest.raises(DataError, match="oktopk data speak"):
        read_manifest(tmp_path / "none.csv")


def test_unsorted_manifests_are_read_by_duration(tmp_path):
    for name, seconds in (("a", 2.0), ("b", 1.0)):
        utterance(tmp_path / f"{name}.wav", "go\n home", seconds)
    (tmp_path / "m.csv").write_text("a.wav,a.txt\nb.wav,b.txt\n")
    assert [(u.audio.stem, u.text) for u in read_manifest(tmp_path / "m.csv")] == [
        ("b", "GO HOME"),
        ("a", "GO HOME"),
    ]


def test_speakers_are_read_from_names_like_an4s():
    assert speaker(Path("wav/an251-fash-b.wav")) == "fash"
    assert speaker(Path("cen1-m3_us_12-b.sph")) == "m3_us_12"
    assert speaker(Path("84-121123-0000.flac")) is None


def stranger(tmp_path: Path) -> Path:
    """A manifest as the reference's authors shipped it: their paths, in no order."""
    for part, seconds in (("train", 2.0), ("val", 1.2)):
        (tmp_path / "an4" / part).mkdir(parents=True)
        utterance(tmp_path / "an4" / part / "same.wav", "YES", seconds)
    utterance(tmp_path / "an4" / "train" / "brief.wav", "NO", 0.5)
    path = tmp_path / "an4_train_manifest.csv"
    names = ["same", "brief"]
    path.write_text(
        "".join(f"/home/x/an4/train/{n}.wav,/home/x/an4/train/{n}.txt\n" for n in names)
    )
    return path


def test_fix_manifest_repairs_paths_and_order(tmp_path, capsys):
    path = stranger(tmp_path)
    assert command("fix-manifest", path, "--root", tmp_path / "an4") == 0
    assert "2 utterances" in capsys.readouterr().out
    assert path.read_text() == (
        "an4/train/brief.wav,an4/train/brief.txt\nan4/train/same.wav,an4/train/same.txt\n"
    )
    repaired = repair(path, tmp_path, tmp_path / "new" / "m.csv", prune=True)
    assert repaired.read_text() == "../an4/train/same.wav,../an4/train/same.txt\n"


def test_fix_manifest_does_not_guess(tmp_path):
    path = stranger(tmp_path)
    before = path.read_text()
    (tmp_path / "an4" / "train" / "brief.txt").unlink()
    with pytest.raises(DataError, match=r"an4_train_manifest.csv:2: no file named .*brief.txt"):
        repair(path, tmp_path, path)
    path.write_text("/home/x/same.wav,/home/x/same.txt\n")
    with pytest.raises(DataError, match=r"/home/x/same.wav could be .*train.* and .*val"):
        repair(path, tmp_path, path)
    assert path.read_text() != before and "/home/x" in path.read_text()
    with pytest.raises(DataError, match="is not a folder"):
        repair(path, tmp_path / "nowhere", path)


def test_a_folder_needs_two_manifests(tmp_path, capsys):
    assert command("check", tmp_path) == 1
    assert "must have one file *train_manifest.csv; it has none" in capsys.readouterr().err
    pair = utterance(tmp_path / "a.wav"), tmp_path / "a.txt"
    for name in ("an4_train", "an4_val", "an4_test"):
        write_manifest(tmp_path / f"{name}_manifest.csv", [pair])
    with pytest.raises(DataError, match=r"it has an4_val_manifest.csv, an4_test_manifest.csv"):
        find_manifests(tmp_path)


@pytest.mark.skipif(not REAL.is_dir(), reason="AN4 is not next to the project")
def test_the_real_an4(tmp_path, capsys):
    assert command("an4", REAL, "--out", tmp_path, "--prune") == 0
    said = capsys.readouterr().out
    assert "897 utterances, 0.70 hours (1.0 to 6.4 s), 74 speakers" in said
    assert "130 utterances, 0.10 hours (0.7 to 6.2 s), 10 speakers" in said


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_help_with_an_example(capsys, action):
    with pytest.raises(SystemExit, match="0"):
        command(action, "--help")
    assert f"example: oktopk data {action} " in capsys.readouterr().out


def test_other_commands_need_no_extra():
    code = (
        "import sys, oktopk.cli; oktopk.cli.parser([]);"
        "print({'soundfile', 'espeakng_loader', 'jiwer', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
