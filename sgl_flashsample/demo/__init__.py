"""What a person runs to see it work: a checkpoint whose distribution is known, a server, requests, counters."""
