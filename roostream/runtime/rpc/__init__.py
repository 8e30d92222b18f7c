"""Calls between programs: frames, a transport interface, TCP client and server, certificates and tokens."""
