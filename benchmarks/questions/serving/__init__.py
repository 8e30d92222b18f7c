"""What serving costs, alone, beside other ways to serve, and while something happens to it."""
