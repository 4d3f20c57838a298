"""A device without hardware, built as a vendor builds one for torch."""

__version__ = "0.1.0"
