"""`python -m training.doctor`."""

import sys

from training.doctor.screen import main

if __name__ == "__main__":
    sys.exit(main())
