"""Does a job survive departures, and what does one cost it? Played on a private mesh, judged from what was seen."""
