"""What final_report.py says: collected from the phases' files, put in words and plots."""
