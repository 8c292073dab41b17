"""What people look at: local pages and HTML files. `web` is what all of them share."""
