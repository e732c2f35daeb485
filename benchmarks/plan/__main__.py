import sys

from fp8_suite.benchmarks.plan.main import main

sys.exit(main())
