"""Where rows live: what is known of tables, which owner has which piece of them, and what that would cost.
Pure, numpy alone."""
