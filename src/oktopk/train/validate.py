"""Loss, word and character error rates on the test set, the same for any world size.

The test set is cut into batches once, and the batches are distributed over the ranks: an utterance
is in the same batch for any world size. Each rank fills in the rows of its utterances, and one
allreduce combines them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jiwer
import torch
from torch import Tensor, nn

from oktopk.comm.communicator import Comm
from oktopk.runlog.schema import Sample
from oktopk.train.data.batches import Batch, collate, shard
from oktopk.train.data.features import Spectra
from oktopk.train.data.manifest import Utterance
from oktopk.train.decode import beam, greedy
from oktopk.train.models.lstman4 import Lstman4, ctc_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Metrics of the model on the test set. WER may exceed 1, because insertions count."""

    val_loss: float
    """Mean over utterances of the CTC loss."""

    wer: float
    """Word errors of the corpus over its words."""

    cer: float
    """Character errors of the corpus over its characters, spaces included."""

    mean_utterance_wer: float
    """Mean over utterances of each one's WER, as the original code computed it."""

    pseudo_accuracy: float
    """max(0, 1 - WER)."""

    utterances: int

    samples: list[Sample]
    """A few utterances."""


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
    """Evaluate the test set. `width` is that of the beam search; 0 decodes greedily. Collective."""
    average_statistics(model, comm)
    rows = torch.zeros(len(test), 5, dtype=torch.float64)
    shown: list[Sample] = []
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for indices in shard(len(test), batch, comm.size, comm.rank):
            part = collate(spectra, test, indices, epoch=0, seed=0, augment=False)
            losses, texts = _recognize(model, part, device, width)
            for i, said, heard, loss in zip(part.ids, part.texts, texts, losses, strict=True):
                rows[i] = torch.tensor([loss, *errors(said, heard)], dtype=torch.float64)
                shown.append(Sample(said, heard))
    model.train(was_training)
    # each row is nonzero on one rank only, so the sum is exact
    rows = comm.all_reduce_(rows.to(device), stage="validation").cpu()
    return summarize(rows, evenly_spaced(shown, samples))


def evenly_spaced(shown: list[Sample], number: int) -> list[Sample]:
    """At most `number` of the samples, from the shortest to the longest."""
    chosen = min(number, len(shown))
    return [shown[i * len(shown) // chosen] for i in range(chosen)]


def _recognize(
    model: Lstman4, part: Batch, device: torch.device, width: int
) -> tuple[list[float], list[str]]:
    log_probs, lengths = model(part.inputs.to(device), part.lengths.to(device))
    targets, target_lengths = part.targets.to(device), part.target_lengths.to(device)
    losses = ctc_loss(log_probs, lengths, targets, target_lengths)
    texts = beam(log_probs, lengths, width) if width else greedy(log_probs, lengths)
    return losses.tolist(), texts


def errors(said: str, heard: str) -> tuple[int, int, int, int]:
    """Word errors, words, character errors, characters of one utterance."""
    words, characters = jiwer.process_words(said, heard), jiwer.process_characters(said, heard)
    return (
        words.substitutions + words.deletions + words.insertions,
        words.substitutions + words.deletions + words.hits,
        characters.substitutions + characters.deletions + characters.insertions,
        characters.substitutions + characters.deletions + characters.hits,
    )


def summarize(rows: Tensor, samples: list[Sample]) -> Validation:
    """Rates of the corpus from rows of (loss, word errors, words, character errors, characters)."""
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
    """Average the batch-norm statistics over ranks, as each computes those of its own batches."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = comm.all_reduce_(torch.cat([buffer.flatten() for buffer in buffers]), stage="validation")
    flat /= comm.size
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view(buffer.shape))


def is_validated(epoch: int, epochs: int, every: int) -> bool:
    """Whether epoch `epoch` (from 0) of `epochs` is validated: 0, every-1, 2 every-1, ..., last."""
    return epoch == 0 or (epoch + 1) % every == 0 or epoch == epochs - 1
