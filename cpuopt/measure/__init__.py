"""Speed and its uncertainty: profiles, rates of the machine, roofline, paired comparison."""
