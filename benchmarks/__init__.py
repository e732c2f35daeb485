"""Reports, comparisons, sweeps, throughput measurements and capacity planning."""

from fp8_suite.core.packages import start_command

start_command("matplotlib", "jinja2")
