import sys

from training.doctor.report import main

if __name__ == "__main__":
    sys.exit(main())
