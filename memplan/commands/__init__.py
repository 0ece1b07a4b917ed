"""The commands of ``memplan``, a file each. What a command needs it imports when it runs."""
