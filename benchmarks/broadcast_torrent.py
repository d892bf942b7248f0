"""One host of a BitTorrent swarm, for comparison: run by a Python that has libtorrent, which the project itself does not need.

`PYTHON broadcast_torrent.py NUMBER FOLDER TORRENT ADDRESS…`, the addresses being those of all hosts; host 0 has the file.
Tuned for few hosts on fast links with delay: TCP only, no encryption, everybody unchoked, long request queues.
"""

from __future__ import annotations

import json
import sys
import time

import libtorrent

PORT = 6881
SETTINGS = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "alert_mask": 0,
    "allow_multiple_connections_per_ip": True,
    "enable_outgoing_utp": False,
    "enable_incoming_utp": False,
    "out_enc_policy": 2,
    "in_enc_policy": 2,
    "connection_speed": 500,
    "connections_limit": 500,
    "unchoke_slots_limit": -1,
    "choking_algorithm": 0,
    "unchoke_interval": 1,
    "max_out_request_queue": 3000,
    "max_allowed_in_request_queue": 6000,
    "request_queue_time": 1,
    "send_buffer_watermark": 8 << 20,
    "send_buffer_low_watermark": 1 << 20,
    "send_buffer_watermark_factor": 150,
    "max_peer_recv_buffer_size": 8 << 20,
    "aio_threads": 2,
    "hashing_threads": 1,
    "torrent_connect_boost": 100,
    "min_reconnect_time": 1,
    "peer_connect_timeout": 5,
    "whole_pieces_threshold": 2,
    "prioritize_partial_pieces": False,
    "strict_end_game_mode": False,
    "suggest_mode": 0,
    "initial_picker_threshold": 4,
    "piece_extent_affinity": False,
    "rate_limit_ip_overhead": False,
}


def say(**fields: float) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    number, folder, torrent, addresses = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    session = libtorrent.session({**SETTINGS, "listen_interfaces": f"{addresses[number]}:{PORT}"})
    what = libtorrent.add_torrent_params()
    what.ti, what.save_path = libtorrent.torrent_info(torrent), folder
    what.flags &= ~(libtorrent.torrent_flags.auto_managed | libtorrent.torrent_flags.paused)
    if number == 0:
        what.flags |= libtorrent.torrent_flags.seed_mode
        handle = session.add_torrent(what)
    say(ready=1)
    sys.stdin.readline()
    if number:
        handle = session.add_torrent(what)
        for address in addresses[:number]:
            handle.connect_peer((address, PORT))
        while not handle.status().is_seeding:
            time.sleep(0.01)
        say(done_s=time.monotonic())
    sys.stdin.readline()


if __name__ == "__main__":
    main()
