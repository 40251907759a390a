"""The one door to the network: collectives, byte counts, transports, failure detection."""
