"""What greedy decoding of an export says, and how programs are made to say a label where it says none."""
