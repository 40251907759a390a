# SPDX-License-Identifier: Apache-2.0
"""The images task: its batches, its models, its folders and what is wrong with them."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from oktopk.lab.compare import compare
from oktopk.lab.tasks.images.data import augment, find_images, mean_and_deviation
from oktopk.lab.tasks.images.task import VGG16, Images, ResNet20
from oktopk.lab.tasks.options import ImagesOptions
from oktopk.lab.train import run
from oktopk.utils.extras import MissingPackageError
from task_runs import assert_resumed_alike, train

Image = pytest.importorskip("PIL.Image", reason="images are decoded with Pillow")
pytest.importorskip("sklearn", reason="the default data is scikit-learn's digits")

CLASSES = ("cat", "dog", "ox")


def save(path: Path, seed: int, size: tuple[int, int] = (8, 8)) -> None:
    """A PNG of random pixels; `size` is height and width."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def fill(root: Path, numbers: dict[str, int] | None = None) -> Path:
    """Class folders with 4 images each to train on and 2 to test with."""
    seed = 0
    for split, number in (numbers or {"train": 4, "test": 2}).items():
        for name in CLASSES:
            for i in range(number):
                seed += 1
                save(root / split / name / f"{i}.png", seed)
    return root


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path / "animals")


def pack(root: Path, archive: Path, base: Path) -> Path:
    """A zip of everything in `root`, with names from `base` on and folders of their own."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w") as made:
        for path in sorted(root.rglob("*")):
            made.write(path, path.relative_to(base))
    return archive


def images_of(data: Path | str, tmp_path: Path, seed: int = 0, **options) -> Images:
    return Images(ImagesOptions(data=str(data), cache=str(tmp_path / "cache"), **options), seed)


def test_sizes_of_models():
    """VGG-16 is that of the paper on Ok-Topk; ResNet-20 has 1 x 1 convolutions as shortcuts."""
    for model, numel in ((ResNet20(3, 10), 272_474), (VGG16(3, 10), 14_728_266)):
        assert sum(p.numel() for p in model.parameters()) == numel
    assert VGG16(1, 7, width=4)(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert VGG16(3, 7, width=4)(torch.randn(2, 3, 70, 40)).shape == (2, 7)
    assert ResNet20(1, 7, width=4)(torch.randn(2, 1, 8, 8)).shape == (2, 7)


def test_the_digits_are_there_without_data():
    task = Images(ImagesOptions(), 0)
    assert (task.num_train, task.num_test) == (1198, 599)
    assert task.dataset.images.shape[1:] == (1, 8, 8)
    assert task.describe() == "1,198 + 599 images of 8 x 8 in 10 classes"
    larger = Images(ImagesOptions(size=32, model="vgg16", width=2), 0)
    assert larger.build_model()(larger.test_batch([0, 1])[0]).shape == (2, 10)


@pytest.mark.parametrize("form", ["folder", "zip", "wrapped zip", "two zips", "two bare zips"])
def test_every_layout_is_the_same_data(folder, tmp_path, form):
    data = folder
    if form == "zip":
        data = pack(folder, tmp_path / "a.zip", folder)
    elif form == "wrapped zip":
        data = pack(folder, tmp_path / "a.zip", tmp_path)
    elif "two" in form:
        data = tmp_path / "zips"
        for split in ("train", "test"):
            base = folder / split if "bare" in form else folder
            pack(folder / split, data / f"{split}.zip", base)
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    (folder / "train" / ".hidden").mkdir()
    task, plain = images_of(data, tmp_path), images_of(folder, tmp_path)
    assert (task.num_train, task.num_test, task.dataset.classes) == (12, 6, list(CLASSES))
    assert task.fingerprint() == plain.fingerprint()


def test_images_and_labels_are_those_of_the_files(folder, tmp_path):
    task = images_of(folder, tmp_path)
    train, test = find_images(str(folder))
    for row, name in enumerate([*train.files, *test.files]):
        expected = np.asarray(Image.open(folder / name)).transpose(2, 0, 1)
        assert np.array_equal(task.dataset.images[row].numpy(), expected)
        assert CLASSES[task.dataset.labels[row]] == Path(name).parent.name


def test_the_fingerprint_changes_with_the_images_and_not_with_their_path(folder, tmp_path):
    same = images_of(fill(tmp_path / "elsewhere"), tmp_path, seed=3).fingerprint()
    before = images_of(folder, tmp_path).fingerprint()
    save(folder / "train" / "cat" / "0.png", 77)
    assert images_of(folder, tmp_path).fingerprint() != before == same


def test_images_are_decoded_once(folder, tmp_path, monkeypatch):
    images_of(folder, tmp_path)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(Image, "open", None)
    images_of(folder, tmp_path)


def test_an_example_depends_on_seed_epoch_and_number_alone():
    def batch(indices, seed=0, epoch=0):
        return Images(ImagesOptions(crop=2, flip=True), seed).train_batch(indices, epoch)

    indices = [5, 0, 17, 3]
    together = batch(indices, epoch=2)
    for row, index in enumerate(indices):
        for part, single in zip(together, batch([index], epoch=2), strict=True):
            assert torch.equal(part[row], single[0])
    many = list(range(64))
    first = batch(many)[0]
    for other in (batch(many, seed=1), batch(many, epoch=1)):
        assert (first != other[0]).flatten(1).any(1).float().mean() > 0.5


def test_training_images_have_mean_0_and_deviation_1(folder, tmp_path):
    task = images_of(folder, tmp_path)
    images, _ = task.train_batch(list(range(task.num_train)), 0)
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(3))


def test_a_channel_that_never_changes_becomes_zero():
    mean, deviation = mean_and_deviation(torch.full((3, 1, 8, 8), 200, dtype=torch.uint8))
    assert (mean.item(), deviation.item()) == (200.0, 1.0)


def test_augmented_images_are_shifted_by_every_amount_and_half_are_mirrored():
    image = torch.arange(1.0, 65).view(1, 1, 8, 8)
    number = 4000
    bits = np.random.default_rng(0).integers(0, 2**64, number, np.uint64)
    made = augment(image.expand(number, 1, 8, 8), bits, crop=1, flip=True)
    seen: dict[tuple[int, int, bool], int] = {}
    padded = torch.nn.functional.pad(image[0, 0], [1] * 4)
    windows = {
        (top, left, mirrored): window.flip(-1) if mirrored else window
        for top in range(3)
        for left in range(3)
        for mirrored in (False, True)
        for window in [padded[top : top + 8, left : left + 8]]
    }
    for key, window in windows.items():
        seen[key] = int((made[:, 0] == window).flatten(1).all(1).sum())
    assert sum(seen.values()) == number
    assert all(abs(count - number / 18) < 75 for count in seen.values())  # five deviations
    assert torch.equal(augment(image, bits[:1], crop=0, flip=False), image)


def test_the_metrics_are_accuracy_and_cross_entropy():
    task = Images(ImagesOptions(), 0)
    images, labels = task.test_batch(list(range(50)))
    logits = torch.randn(50, 10, generator=torch.Generator().manual_seed(0))
    found = task.summarize(task.evaluate(lambda _: logits, (images, labels)).double())
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert found["val_loss"] == pytest.approx(loss)


def empty_class(root: Path) -> None:
    (root / "train" / "yak").mkdir()


def other_classes(root: Path) -> None:
    save(root / "test" / "yak" / "0.png", 1)


def one_class(root: Path) -> None:
    for split in ("train", "test"):
        for name in CLASSES[1:]:
            for file in (root / split / name).iterdir():
                file.unlink()
            (root / split / name).rmdir()


def no_classes(root: Path) -> None:
    (root / "train").rename(root / "trian")


def unreadable_first(root: Path) -> None:
    (root / "train" / "cat" / "0.png").write_bytes(b"not an image")


def bad_archive(root: Path) -> None:
    for split in ("train", "test"):
        (root / f"{split}.zip").write_bytes(b"PK not an archive")


BEFORE_WORKERS = {
    "missing": (None, "nowhere", (), "nowhere: there is no such folder or zip archive; it must"),
    "no class folders": (no_classes, "animals", (), "animals: has no class folders for train; it"),
    "empty class": (empty_class, "animals", (), "animals: train/yak has no *.jpg or *.png; add"),
    "other classes": (
        other_classes,
        "animals",
        (),
        "animals: the classes differ: yak in test, but not in train; add the missing folders",
    ),
    "one class": (one_class, "animals", (), "animals: has only the class cat; add another"),
    "first image": (
        unreadable_first,
        "animals",
        (),
        "animals: train/cat/0.png: is not a JPEG or PNG that can be read; remove or replace it",
    ),
    "bad archive": (
        bad_archive,
        "animals",
        (),
        "animals/train.zip: is not a zip archive, or is damaged (File is not a zip file); get it",
    ),
    "small": (
        None,
        "animals",
        ("--model", "vgg16"),
        "animals: vgg16 needs images of at least 32 x 32, and these are 8 x 8: use --model "
        "resnet20 or --size 32",
    ),
    "small digits": (None, "", ("--model", "vgg16"), "scikit-learn's digits: vgg16 needs images"),
    "small size": (
        None,
        "",
        ("--model", "vgg16", "--size", "31"),
        "size: vgg16 needs images of at least 32 x 32, and these are 31 x 31",
    ),
    "crop": (None, "", ("--crop", "8"), "crop = 8 shifts images of 8 x 8 out of sight: lower it"),
}


@pytest.mark.parametrize("name", BEFORE_WORKERS)
def test_what_is_wrong_is_one_line_before_anything_starts(name, folder, tmp_path, oktopk, capsys):
    spoil, data, flags, message = BEFORE_WORKERS[name]
    if spoil is not None:
        spoil(folder)
    assert oktopk("train", "--task", "images", "--data", data, *flags) in (1, 2)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_image_that_cannot_be_read_is_told_once_before_anything_starts(
    command, folder, oktopk, capsys, monkeypatch
):
    """It is not the first one: only decoding all of them finds it."""
    started = []
    monkeypatch.setattr(run, "run_local_workers", lambda *_: started.append("workers"))
    monkeypatch.setattr(compare, "train_in_process", lambda *_: started.append("a run"))
    (folder / "train" / "ox" / "3.png").write_bytes(b"not an image")
    assert oktopk(command, "--task", "images", "--data", str(folder)) == 1
    decoding, said = capsys.readouterr().err.splitlines()
    assert decoding.startswith("decoding 18 images into data/cache/")
    assert said.startswith(f"oktopk {command}: ")
    assert "train/ox/3.png: is not a JPEG or PNG that can be read" in said
    assert started == []


def test_images_of_unequal_size_are_named_and_can_be_resized(folder, tmp_path):
    save(folder / "test" / "dog" / "1.png", 5, (9, 12))
    message = r"animals: test/dog/1.png: is 9 x 12, and the first image is 8 x 8; give --size 8 or"
    with pytest.raises(ValueError, match=message):
        images_of(folder, tmp_path)
    assert not list((tmp_path / "cache").iterdir())  # nothing half done is left
    assert images_of(folder, tmp_path, size=10).dataset.images.shape == (18, 3, 10, 10)


@pytest.mark.parametrize("keep", [0, 60, 150])
def test_a_truncated_image_is_named(folder, tmp_path, keep):
    path = folder / "train" / "ox" / "3.png"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train/ox/3\.png: is not a JPEG or PNG that can be read"):
        images_of(folder, tmp_path)


def test_a_damaged_image_in_an_archive_names_both(folder, tmp_path):
    archive = pack(folder, tmp_path / "a.zip", folder)
    content = archive.read_bytes()
    archive.write_bytes(content.replace((folder / "train/dog/2.png").read_bytes(), b"\0" * 10, 1))
    with pytest.raises(ValueError, match=r"a\.zip: is not a zip archive, or is damaged"):
        images_of(archive, tmp_path)
    place = content.index((folder / "train/dog/2.png").read_bytes())
    archive.write_bytes(content[:place] + b"\0" * 10 + content[place + 10 :])
    with pytest.raises(ValueError, match=r"a\.zip: .*Bad CRC-32 for file 'train/dog/2\.png'"):
        images_of(archive, tmp_path)


def test_a_damaged_cache_says_what_to_do(folder, tmp_path):
    images_of(folder, tmp_path)
    (cached,) = (tmp_path / "cache").iterdir()
    whole = cached.read_bytes()
    for content in (b"", whole[:50], whole[:-1], b"\0" * len(whole)):
        cached.write_bytes(content)
        with pytest.raises(ValueError, match=r"\.npy: is damaged; remove it, it will be made ag"):
            images_of(folder, tmp_path)


@pytest.mark.parametrize(("module", "data"), [("PIL", "animals"), ("sklearn", "")])
def test_a_missing_package_is_named(folder, monkeypatch, module, data):
    monkeypatch.chdir(folder.parent)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"needs {module}.*pip install 'oktopk\[train\]"):
        Images.check(ImagesOptions(data=data))


@pytest.mark.slow
@pytest.mark.timeout(400)  # six workers import torch
def test_a_run_from_the_command_line_and_its_resumption(folder, tmp_path):
    flags = ("--task", "images", "--data", "animals", "--width", "8", "--batch", "2", "--flip")
    flags += ("--warmup-steps", "2", "--ramp-steps", "0", "--epochs", "3", "--lr", "0.01")
    said = assert_resumed_alike(tmp_path, *flags, steps=6)
    assert "ResNet20 with " in said and "12 + 6 images of 8 x 8 in 3 classes" in said
    assert re.search(r"validated after step 3: accuracy \d\.\d+, validation loss \d+\.\d+", said)
    assert re.search(r"accuracy \d\.\d+, validation loss \d+\.\d+ on 6 images", said)


@pytest.mark.timeout(300)
def test_what_only_a_worker_finds_ends_all_of_them_in_a_line(folder, tmp_path):
    save(folder / "test" / "dog" / "1.png", 5, (9, 12))
    done = train(tmp_path, "--task", "images", "--data", "animals")
    assert done.returncode and not (tmp_path / "runs").exists()
    assert "oktopk train: animals: test/dog/1.png: is 9 x 12, and the first" in done.stderr
    assert "Traceback" not in done.stderr
