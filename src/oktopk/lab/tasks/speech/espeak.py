# SPDX-License-Identifier: Apache-2.0
"""A program that synthesizes speech with espeak-ng. It uses the standard library only.

    python espeak.py LIBRARY DATA < requests > samples

`synthesis` runs it in a process of its own, because espeak-ng keeps state between utterances: only
a new process gives the same bytes for the same requests. espeak-ng also seeds the C library's
random numbers from the clock, so they are seeded again here. A request is a line of JSON,
{"voice", "speed", "pitch", "range", "gap", "text"}; the answer is the sampling rate and the
number of samples (two little-endian int32) and the samples (int16, the machine's byte order).
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from typing import Any

SYNCHRONOUS, DO_NOT_EXIT = 2, 0x8000
UTF8_WITH_PHONEMES = 1 | 0x100
PARAMETERS = {"speed": 1, "pitch": 3, "range": 4, "gap": 7}
CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def main(library: str, data: str) -> None:
    """Answer requests until the input ends."""
    espeak, libc = ctypes.CDLL(library), ctypes.CDLL(None)
    rate = espeak.espeak_Initialize(SYNCHRONOUS, 0, data.encode(), DO_NOT_EXIT)
    if rate <= 0:
        sys.exit(f"espeak-ng cannot start with the voices in {data} (error {rate})")
    pieces: list[bytes] = []

    @CALLBACK
    def collect(samples: Any, count: int, _: Any) -> int:
        if samples and count > 0:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    espeak.espeak_SetSynthCallback(collect)
    for line in sys.stdin:
        request = json.loads(line)
        known = espeak.espeak_SetVoiceByName(request["voice"].encode()) == 0
        # espeak-ng silently ignores an unknown variant, as in "en-us+nobody"
        variant = request["voice"].partition("+")[2]
        if not known or not os.path.exists(os.path.join(data, "voices", "!v", variant)):
            sys.exit(f"espeak-ng has no voice {request['voice']} in {data}")
        for name, number in PARAMETERS.items():
            espeak.espeak_SetParameter(number, request[name], 0)
        pieces.clear()
        espeak.espeak_ng_SetRandSeed(ctypes.c_long(1))
        libc.srand(1)
        text = request["text"].encode() + b"\0"
        if espeak.espeak_Synth(text, len(text), 0, 1, 0, UTF8_WITH_PHONEMES, None, None) != 0:
            sys.exit(f"espeak-ng cannot say {request['text']!r}")
        samples = b"".join(pieces)
        sys.stdout.buffer.write(struct.pack("<ii", rate, len(samples) // 2) + samples)


if __name__ == "__main__":
    main(*sys.argv[1:])
