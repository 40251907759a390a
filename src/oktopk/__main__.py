# SPDX-License-Identifier: Apache-2.0
"""`python -m oktopk`, for launchers that start modules."""

from oktopk.cli import main

if __name__ == "__main__":
    main()
