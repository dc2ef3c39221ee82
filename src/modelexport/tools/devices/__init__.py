"""Files on devices: which module does not run there, which is wrong there, and what to change."""
