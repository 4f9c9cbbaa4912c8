"""Tables, figures and pages from records. Of the experiments, only their records and rows are known here."""
