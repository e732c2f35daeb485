import sys

from fp8_suite.training.doctor.report import main

if __name__ == "__main__":
    sys.exit(main())
