// test_p2p_inside.cpp: what closes between two steps of dc_comm_close.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "comm/p2p.h"
#include "ranks.h"

using namespace ranks;

namespace {

// A large message is copied from its sender's buffer, which is the sender's again once closing has withdrawn it. Here
// rank 0 has come that far, and not yet to where its peers see that it has left.
TEST(Closing, NobodyReceivesWhatABufferHoldsLater) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    const int64_t n = 100000;
    std::vector<char> x((size_t)n, (char)('a' + rank));
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    if (rank == 0) {
      dc_request *sent;
      FINE(dc_isend(c, x.data(), n, DC_U8, 1, 7, nullptr, &sent));
      dc__p2p_close(c);
      WANT_STATUS(DC_E_STATE, dc_request_wait(sent, 0));
      memset(x.data(), 'z', (size_t)n);
      FINE(dc_request_free(sent));
      FINE(dc_barrier(c, 0));
      WANT_STATUS(DC_E_PEER_DIED, dc_barrier(c, 0)); // until rank 1 has been told
    } else {
      FINE(dc_barrier(c, 0));
      WANT_STATUS(DC_E_PEER_DIED, dc_recv(c, x.data(), n, DC_U8, 0, 7, nullptr));
      WANT_TEXT(") left the group; rank 1 waits for it in recv(uint8, count 100000, tag 7, from rank 0)");
    }
    FINE(dc_comm_close(c));
    return "";
  }));
}

} // namespace
