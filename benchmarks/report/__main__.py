import sys

from fp8_suite.benchmarks.report.main import main

if __name__ == "__main__":
    sys.exit(main())
