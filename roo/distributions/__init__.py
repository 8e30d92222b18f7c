"""How values are distributed, in bounded sketches (histograms.py): of live batches (trainer/monitoring), and of days at rest."""
