"""How each framework keeps states, what it inserts at the seams, and what its optimizer step adds."""
