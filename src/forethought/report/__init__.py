"""Reports for people: one HTML page per run (`write_report`), and runs and data on a terminal (`show`, `compare`)."""

from forethought.report.html import write_report
from forethought.report.terminal import compare, show

__all__ = ["compare", "show", "write_report"]
