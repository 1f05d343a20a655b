"""What one rank reads of the file that another has replaced."""

import os
from pathlib import Path

from stepscope.commands.command import Command, CommandName
from stepscope.commands.consensus import FOLDER, NOTICES, ConsensusFiles, Proposal, ProposalState


def test_a_file_of_the_same_inode_and_time_is_read_again(tmp_path: Path) -> None:
    """ext4 gives an inode to the next file but one, and its times may go in ticks of 4 ms."""
    writer, reader = ConsensusFiles(tmp_path), ConsensusFiles(tmp_path)
    proposed = Proposal(Command(7, CommandName.MARK, {}))
    decided = Proposal(proposed.command, ProposalState.DECIDED, 5)
    writer.write_notices([proposed])
    assert reader.notices() == [proposed]
    path = tmp_path / FOLDER / NOTICES
    before = path.stat()
    writer.write_notices([decided])
    path.with_name("next").write_bytes(path.read_bytes())
    # The same inode, as after a second replacement, within the same tick.
    os.replace(path.with_name("next"), path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reader.notices() == [decided]
