"""How fast, and how sure: profiles, roofs, paired comparison."""
