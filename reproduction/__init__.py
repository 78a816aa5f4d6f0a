"""The tables and figures of the papers, run again and compared with what they print."""
