"""Writers: owners and trees become metadata and documents. The only place where they turn into text."""
