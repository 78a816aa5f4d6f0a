"""What every strategy is made of: server, party role, learners, options and accounting."""
