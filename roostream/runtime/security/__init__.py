"""Who may call, and over what: TLS of HTTP ports, certificates and tokens of the link, and the files that they are in."""
