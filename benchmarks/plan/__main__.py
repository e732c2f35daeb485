import sys

from benchmarks.plan.main import main

if __name__ == "__main__":
    sys.exit(main())
