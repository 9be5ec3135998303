"""What a run says about itself: host, versions, git, without secrets."""
