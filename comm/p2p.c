/* p2p.c: messages between two ranks (p2p.h). */
#include "p2p.h"

#include "comm_impl.h"

int64_t dc__p2p_bytes(int size) { return 0; }
int dc__p2p_open(dc_comm *c, void *area) { return DC_OK; }
void dc__p2p_close(dc_comm *c) {}
