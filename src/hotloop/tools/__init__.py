"""Command line tools around the compiler; nothing here is needed to compile. Read cli.py first."""
