import sys

from fp8_suite.benchmarks.evaluate.main import main

if __name__ == "__main__":
    sys.exit(main())
