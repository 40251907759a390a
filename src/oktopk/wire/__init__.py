# SPDX-License-Identifier: Apache-2.0
"""What is sent: codecs, which write selected entries as words of 32 bits, and messages."""
