"""Who may call between programs: certificates and tokens of the link."""
