"""Loss, word and character error rates on the test set, the same numbers on any number of ranks.

Batches are cut once and dealt out to the ranks, so an utterance meets the same neighbours however
many ranks there are; each fills in the rows of its utterances and one sum brings them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import jiwer
import torch
from torch import Tensor, nn

from oktopk.comm.communicator import Comm
from oktopk.train.data.batches import Batch, collate, shard
from oktopk.train.data.features import Spectra
from oktopk.train.data.manifest import Utterance
from oktopk.train.decode import beam, greedy
from oktopk.train.models.lstman4 import Lstman4, ctc_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """What the model does on the test set. WER may exceed 1: insertions count."""

    val_loss: float
    """Mean over utterances of the CTC loss."""

    wer: float
    """Word errors of the corpus over its words."""

    cer: float
    """Character errors of the corpus over its characters, spaces included."""

    mean_utterance_wer: float
    """Mean over utterances of each one's WER, as the notes computed it."""

    pseudo_accuracy: float
    """max(0, 1 - WER)."""

    utterances: int

    samples: list[dict[str, str]]
    """A few utterances: what was said and what was heard."""


def validate(
    model: Lstman4,
    test: list[Utterance],
    spectra: Spectra,
    comm: Comm,
    device: torch.device,
    *,
    batch: int,
    width: int,
    samples: int,
) -> Validation:
    """Run the test set, dealt out over the ranks. `width` of the beam; 0 is greedy."""
    average_statistics(model, comm)
    rows = torch.zeros(len(test), 5, dtype=torch.float64)
    shown: list[dict[str, str]] = []
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for indices in shard(len(test), batch, comm.size, comm.rank):
            part = collate(spectra, test, indices, epoch=0, seed=0, augment=False)
            losses, texts = _listen(model, part, device, width)
            for i, said, heard, loss in zip(part.ids, part.texts, texts, losses, strict=True):
                rows[i] = torch.tensor([loss, *errors(said, heard)], dtype=torch.float64)
                shown.append({"said": said, "heard": heard})
    model.train(was_training)
    # every row is zero on all ranks but one, so the sum is exact
    rows = comm.all_reduce_(rows.to(device), stage="validation").cpu()
    return summarise(rows, spread(shown, samples))


def spread(shown: list[dict[str, str]], number: int) -> list[dict[str, str]]:
    """So many of them, from the shortest to the longest."""
    chosen = min(number, len(shown))
    return [shown[i * len(shown) // chosen] for i in range(chosen)]


def _listen(
    model: Lstman4, part: Batch, device: torch.device, width: int
) -> tuple[list[float], list[str]]:
    log_probs, lengths = model(part.inputs.to(device), part.lengths.to(device))
    targets, target_lengths = part.targets.to(device), part.target_lengths.to(device)
    losses = ctc_loss(log_probs, lengths, targets, target_lengths)
    texts = beam(log_probs, lengths, width) if width else greedy(log_probs, lengths)
    return losses.tolist(), texts


def errors(said: str, heard: str) -> tuple[int, int, int, int]:
    """Word errors, words, character errors, characters of one utterance."""
    words, letters = jiwer.process_words(said, heard), jiwer.process_characters(said, heard)
    return (
        words.substitutions + words.deletions + words.insertions,
        words.substitutions + words.deletions + words.hits,
        letters.substitutions + letters.deletions + letters.insertions,
        letters.substitutions + letters.deletions + letters.hits,
    )


def summarise(rows: Tensor, samples: list[dict[str, str]]) -> Validation:
    """Rates of the corpus from rows of (loss, word errors, words, letter errors, letters)."""
    total = rows.sum(0).tolist()
    wer = total[1] / total[2]
    return Validation(
        val_loss=total[0] / len(rows),
        wer=wer,
        cer=total[3] / total[4],
        mean_utterance_wer=(rows[:, 1] / rows[:, 2]).mean().item(),
        pseudo_accuracy=max(0.0, 1.0 - wer),
        utterances=len(rows),
        samples=samples,
    )


def average_statistics(model: nn.Module, comm: Comm) -> None:
    """Average the batch-norm statistics over ranks: each has seen only its own batches."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = comm.all_reduce_(torch.cat([buffer.flatten() for buffer in buffers]), stage="validation")
    flat /= comm.size
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view(buffer.shape))


def validates(epoch: int, epochs: int, every: int) -> bool:
    """Whether epoch `epoch` (from 0) of `epochs` is validated: 0, every-1, 2 every-1, ..., last."""
    return epoch == 0 or (epoch + 1) % every == 0 or epoch == epochs - 1
