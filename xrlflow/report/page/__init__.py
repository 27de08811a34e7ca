"""The report as one HTML file that needs no network: what it shows (`document`), and how it is written (`html`)."""
