# SPDX-License-Identifier: Apache-2.0
"""The text task: its batches, its model, its data and what is wrong with it."""

from __future__ import annotations

import re
from hashlib import sha256
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from oktopk.lab.tasks.options import TextOptions
from oktopk.lab.tasks.text import GPT, Corpus, Text, printable, read_corpus
from oktopk.lab.train.config_files import load
from oktopk.lab.train.setup import learning_rate
from task_runs import assert_resumed_alike


@pytest.fixture
def book(tmp_path):
    """A text in which no 16 characters come twice, so that a crop tells where it is from."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{sha256(bytes([i])).hexdigest()}\n" for i in range(150)))
    return path


def text_of(book, seed: int = 0, **options) -> Text:
    return Text(TextOptions(data=str(book), context=16, **options), seed)


def test_an_example_depends_on_seed_epoch_and_number_alone(book):
    task = text_of(book)
    indices = [5, 0, 17, 3]
    together = task.train_batch(indices, epoch=2)
    for row, index in enumerate(indices):
        for part, single in zip(together, task.train_batch([index], epoch=2), strict=True):
            assert torch.equal(part[row], single[0])
    starts = {
        (seed, epoch, index): tuple(text_of(book, seed).train_batch([index], epoch)[0][0].tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
        for index in (0, 1)
    }
    assert len(set(starts.values())) == len(starts)


def test_a_step_has_the_same_examples_for_any_world_size(book):
    task = text_of(book)
    for step in zip(*(task.steps(1, 12 // P, P) for P in (1, 2, 4)), strict=True):
        assert len({tuple(sorted(i for rank in ranks for i in rank)) for ranks in step}) == 1


def test_crops_are_drawn_from_the_whole_text_evenly(book):
    task = text_of(book)
    starts = torch.arange(len(task.corpus.train))
    object.__setattr__(task.corpus, "train", starts)  # a crop then begins with its position
    found = task.train_batch(list(range(20_000)), epoch=0)[0][:, 0]
    assert found.min() >= 0 and found.max() == len(starts) - 17
    shares = torch.histc(found.float(), 10) / len(found)
    assert (shares - 0.1).abs().max() < 0.01  # five deviations


def test_targets_are_the_next_characters(book):
    inputs, targets = text_of(book).train_batch([1, 2, 3], 0)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_validation_crops_do_not_overlap_and_lie_in_the_last_tenth(book):
    for number in (7, 10_000):
        task = text_of(book, validation_crops=number)
        whole = book.read_text()
        inputs, targets = task.test_batch(list(range(task.num_test)))
        crops = [
            task.corpus.decode(torch.cat([a, b[-1:]])) for a, b in zip(inputs, targets, strict=True)
        ]
        tail = whole[len(whole) * 9 // 10 :]
        places = [tail.index(crop) for crop in crops]
        assert all(b - a >= 16 for a, b in pairwise(places))
    assert task.num_test == (len(tail) - 1) // 16


def test_train_and_validation_are_the_whole_text_in_order(book):
    corpus = read_corpus(TextOptions(data=str(book), context=16))
    whole = corpus.decode(torch.cat([corpus.train, corpus.validation]))
    assert whole == book.read_text()
    assert corpus.characters == "".join(sorted(set(whole)))


def test_any_script_and_more_characters_than_a_byte_holds(tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("".join(chr(0x4E00 + i % 1000) + "ä🙂" for i in range(4000)))
    corpus = read_corpus(TextOptions(data=str(path)))
    assert len(corpus.characters) == 1002
    assert corpus.decode(torch.cat([corpus.train, corpus.validation])) == path.read_text()


def test_of_many_files_every_tenth_is_for_validation(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(chr(ord("a") + i) * 50)
    corpus = read_corpus(TextOptions(data=str(tmp_path), context=16))
    assert set(corpus.decode(corpus.validation)) == {"a", "k"}
    assert not set(corpus.decode(corpus.train)) & {"a", "k"}


def test_the_standard_library_is_there_without_data():
    corpus = read_corpus(TextOptions())
    assert isinstance(corpus, Corpus) and len(corpus.characters) <= 128
    assert len(corpus.train) > 5 * len(corpus.validation) > 10**5
    assert sum(not c.isascii() for c in corpus.characters) == 1


def test_the_fingerprint_changes_with_the_text_and_not_with_its_path(book, tmp_path):
    copy, other = tmp_path / "copy.txt", tmp_path / "other.txt"
    copy.write_text(book.read_text())
    other.write_text(book.read_text().replace("a", "b", 1))
    same, changed = (text_of(path).fingerprint() for path in (copy, other))
    assert text_of(book, seed=5).fingerprint() == same != changed


def test_sizes_of_models():
    """nanoGPT prints 0.80M for its CPU setting, without the positions."""
    small = GPT(65)
    numel = sum(p.numel() for p in small.parameters())
    assert numel - small.positions.weight.numel() == 795_904
    with torch.device("meta"):
        large = GPT(30_522, layers=12, heads=12, width=768, context=512)
    assert sum(p.numel() for p in large.parameters()) == 108_787_968


def test_no_position_sees_a_later_one():
    torch.manual_seed(0)
    model, tokens = GPT(20, layers=2, heads=2, width=16, context=12), torch.randint(20, (1, 12))
    before = model(tokens)
    for place in range(12):
        changed = tokens.clone()
        changed[0, place] = (tokens[0, place] + 1) % 20
        differs = (model(changed) != before).any(-1)[0]
        assert not differs[:place].any() and differs[place:].all()


def test_the_first_loss_is_that_of_a_guess(book):
    task = text_of(book)
    torch.manual_seed(0)
    loss = task.loss(task.build_model(), task.train_batch(list(range(64)), 0))
    guess = torch.log(torch.tensor(float(len(task.corpus.characters))))
    torch.testing.assert_close(loss, guess, rtol=0.05, atol=0)


def test_the_metrics_are_those_of_all_characters(book):
    task = text_of(book, validation_crops=9)
    torch.manual_seed(0)
    model, batch = task.build_model(), task.test_batch(list(range(9)))
    found = task.summarize(task.evaluate(model, batch).double())
    logits, targets = model(batch[0]).flatten(0, 1), batch[1].flatten()
    assert found["val_loss"] == pytest.approx(cross_entropy(logits, targets).item(), rel=1e-5)
    right = (logits.argmax(1) == targets).float().mean().item()
    assert found["accuracy"] == pytest.approx(right, rel=1e-5)


def test_only_matrices_decay(book):
    task = text_of(book)
    kept = {n for n, p in task.build_model().named_parameters() if not task.uses_weight_decay(n, p)}
    assert kept and all("norm" in name for name in kept)


def test_samples_continue_prompts_with_known_characters_the_same_way_each_time(book):
    task = text_of(book, vocabulary=1000)
    torch.manual_seed(0)
    model = task.build_model()
    with torch.inference_mode():
        first, second = (task.samples(model, 3) for _ in range(2))
    assert first == second and len(first) == 3
    assert all(sample["prompt"].replace("\\n", "\n") in book.read_text() for sample in first)
    assert all("\n" not in text for sample in first for text in sample.values())


def test_what_cannot_be_printed_is_escaped():
    assert printable("a\nb\tä\x1b") == "a\\nb\\tä\\x1b"


def test_the_cosine_of_the_config_ends_at_its_last_step():
    config = load("text")
    assert config.lr_steps == config.max_steps
    for total in (2000, 10**6):  # of all epochs
        assert learning_rate(config, 0, 2000, total) == pytest.approx(1e-4)
        assert learning_rate(config, 0, 5000, total) == pytest.approx(1e-4)
        assert learning_rate(config, 0, 100, total) == pytest.approx(1e-3, rel=0.01)


BAD = {
    "missing": (None, (), "book.txt: there is no such file; give a text file to --data"),
    "not UTF-8": (b"so\n\xff" * 900, (), "book.txt: line 2: byte 0xff is not UTF-8; save it as"),
    "empty": (b"", (), "has 0 characters, and a context of 64 needs at least 641; use a longer"),
    "short": (b"x" * 640, (), "has 640 characters, and a context of 64 needs at least 641;"),
    "heads": (b"x" * 999, ("--heads", "3"), "width = 128 cannot be divided by heads = 3: make it"),
    "vocabulary": (
        b"abc" * 999,
        ("--vocabulary", "2"),
        "has 3 different characters, and vocabulary is 2; raise vocabulary, or set it to 0",
    ),
    "dropout": (b"x" * 999, ("--dropout", "1"), "dropout must be at most 0.99 (nothing would"),
    "too large": (
        b"x" * 999,
        ("--width", "32768", "--layers", "256"),
        "make about 3.3e+12 weights, and at most 2.1e+09 are possible: lower one of them",
    ),
    "until": (b"x" * 999, ("--until", "wer<1"), "this task has no metric 'wer'; it has val_loss,"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line_before_anything_starts(name, tmp_path, oktopk, capsys):
    content, flags, message = BAD[name]
    if content is not None:
        (tmp_path / "book.txt").write_bytes(content)
    assert oktopk("train", "--task", "text", "--data", "book.txt", *flags) in (1, 2)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said
    assert not (tmp_path / "runs").exists()


def test_exactly_as_long_as_needed_is_enough(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 641)
    task = Text(TextOptions(data=str(path)), 0)
    assert (task.num_train, task.num_test) == (9, 1)
    assert task.train_batch([0], 0)[1].shape == task.test_batch([0])[1].shape == (1, 64)


def test_a_folder_without_texts(tmp_path, oktopk, capsys):
    assert oktopk("train", "--task", "text", "--data", ".") == 1
    assert ".: has no *.txt in it; give a text file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)  # six workers import torch
def test_a_run_from_the_command_line_and_its_resumption(book, tmp_path):
    flags = ("--task", "text", "--data", "book.txt", "--width", "16", "--layers", "1")
    flags += ("--context", "16", "--warmup-steps", "2", "--ramp-steps", "0", "--dropout", "0.1")
    said = assert_resumed_alike(tmp_path, *flags, "--validate-steps", "3", steps=6)
    assert "GPT with 3,648 parameters, 8,775 + 975 characters, 17 different" in said
    assert len(re.findall(r"validated after step \d: validation loss \d\.\d+, accuracy", said)) == 2
    assert "  continued " in said
    assert re.search(r"validation loss \d\.\d+, accuracy \d\.\d+ on \d+ crops", said)
